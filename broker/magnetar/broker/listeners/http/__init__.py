"""The HTTP administration at Pulsar's paths: rows of tables to calls of the service, results and errors to JSON."""
