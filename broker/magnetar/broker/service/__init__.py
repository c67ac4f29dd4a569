"""What may be asked of a broker: typed operations, authorized at one place, for every listener alike."""
