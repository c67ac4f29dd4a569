"""What decides where to ask and where to connect: pure, without clock, socket and loop."""
