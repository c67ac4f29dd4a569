"""The data pipeline beside what Spark's Python data sources can do at all."""
