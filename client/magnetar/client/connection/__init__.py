"""From a topic's name to the broker that serves it, and back to it after every break.

`retries` < `broker_connection` < `pool` < `attachment`
"""
