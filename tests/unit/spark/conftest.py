"""Without the `spark` extra (half a gigabyte) there is nothing to test here."""

import importlib.util

if importlib.util.find_spec("pyspark") is None:
    collect_ignore_glob = ["*"]
