"""Dispatch: subscriptions, their consumers, and which entries go to whom."""
