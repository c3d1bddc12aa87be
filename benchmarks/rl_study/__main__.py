"""`python -m benchmarks.rl_study`; nothing else is here: the checkpoint writer's process imports this file again."""

if __name__ == "__main__":
    from benchmarks.rl_study.command import main

    main()
