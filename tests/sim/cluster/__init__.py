"""The whole cluster in one run: brokers, bookies, metadata store and clients. See sim.scenarios.cluster."""
