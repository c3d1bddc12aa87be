"""`python -m benchmarks.loss`; nothing else is here, because every measuring process imports this file again."""

if __name__ == "__main__":
    from benchmarks.loss.run import main

    main()
