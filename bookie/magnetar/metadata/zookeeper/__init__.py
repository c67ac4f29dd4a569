"""The metadata store on Apache ZooKeeper, over aiozk's records and a session layer of our own."""
