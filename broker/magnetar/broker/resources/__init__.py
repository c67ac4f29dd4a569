"""What every part of the broker shares: byte budgets, and the stores below as narrow interfaces."""
