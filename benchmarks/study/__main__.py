"""`python -m benchmarks.study`; nothing else is here: the checkpoint writer's process imports this file again."""

if __name__ == "__main__":
    from benchmarks.study.command import main

    main()
