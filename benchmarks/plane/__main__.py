"""`python -m benchmarks.plane`: see `run.py`."""

from benchmarks.plane.run import main

if __name__ == "__main__":
    main()
