"""Producers and consumers of one topic, each attached to one broker at a time; the facades above own one or several.

columns, outbox < producer
session < acks < acknowledger, position; window < consumer
"""
