"""PySpark data source and pipeline jobs."""
