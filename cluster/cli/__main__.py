"""`python -m airside.cluster.cli`, the same as `airside`."""

from airside.cluster.cli.program import main

if __name__ == "__main__":
    main()
