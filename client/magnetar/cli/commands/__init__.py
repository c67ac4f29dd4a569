"""The commands for people: messages, topics, subscriptions, policies, settings, Spark's jobs."""
