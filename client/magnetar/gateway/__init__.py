"""Topics for programs without a client: HTTP, server-sent events and WebSocket. ARCHITECTURE.md says where it stands."""
