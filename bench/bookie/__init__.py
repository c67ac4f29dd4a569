"""`python -m bench bookie`: what one bookie does over TCP, beside the raw disk of the same minute."""
