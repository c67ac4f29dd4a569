"""The native protocol: frames to calls on the broker, receipts and deliveries to frames."""
