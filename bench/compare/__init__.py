"""`make bench-compare BASE=rev`: the working tree beside another revision, interleaved, with a verdict for each figure.

| module | what |
|---|---|
| `main.py` | the command line, the rounds, the exit code |
| `revisions.py` | what git and pip do: an environment for each side, kept by what is installed in it |
| `driver.py` | one run of a benchmark on one side, as a child process |
| `verdict.py` | the statistics: pairs of values to an interval and a verdict |
| `report.py` | the table and the JSON file |
"""
