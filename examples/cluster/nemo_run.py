"""The same launch through NeMo-Run: `python examples/cluster/nemo_run.py LAUNCH_SCRIPT`, from a login node.

NeMo-Run (`pip install nemo-run`) writes the batch script, packs the working tree, and submits. Fill in the four names
of your cluster; CKPT, ADAPTED, DATA, TOKENIZER and CONTAINER are taken from the environment.
"""

from __future__ import annotations

import os
import sys

import nemo_run as run

ACCOUNT, PARTITION, LOGIN, FOLDER = "my-account", "batch", "login.example.com", "/scratch/me/bebop"
PASSED_ON = ("CKPT", "ADAPTED", "DATA", "TOKENIZER", "STEPS", "WANDB_PROJECT", "WANDB_API_KEY")
# not done yet counts as a failure, which NeMo-Run requeues; the launch script itself ends with 0 when it was warned
INLINE = """export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS EXIT_SIGNAL=SIGUSR1
bash {script} && [ "$(cat $ADAPTED/latest_checkpointed_iteration.txt)" = "${{STEPS:-1000}}" ]
"""


def executor(nodes: int) -> run.SlurmExecutor:
    """Slurm with one task for each GPU, as examples/cluster/slurm.sh asks for; the container holds the package."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return run.SlurmExecutor(
        account=ACCOUNT,
        partition=PARTITION,
        tunnel=run.SSHTunnel(host=LOGIN, user=os.environ["USER"], job_dir=FOLDER),
        nodes=nodes,
        ntasks_per_node=8,
        gpus_per_node=8,
        time="04:00:00",
        signal="USR1@600",
        retries=20,
        container_image=os.environ["CONTAINER"],
        container_mounts=[f"{FOLDER}:{FOLDER}"],
        # the batch script of NeMo-Run finds the first node's address
        env_vars=passed | {"NNODES": str(nodes), "MASTER_ADDR": "$head_node_ip", "MASTER_PORT": "29500"},
        packager=run.GitArchivePackager(),
    )


def main(script: str) -> None:
    """Submit one launch script."""
    nodes = int(os.environ.get("NNODES", "2"))
    with run.Experiment("mtp-adaptation") as experiment:
        task = run.Script(inline=INLINE.format(script=script))
        experiment.add(task, executor=executor(nodes), name=os.path.basename(script).removesuffix(".sh"))
        experiment.run(detach=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "examples/cluster/qwen3_5_35b_a3b.sh")
