"""Cursors: what a subscription has acknowledged, and its durable form."""
