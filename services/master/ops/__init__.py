"""One file for each RPC: `async def handle(state, request, context)`, nothing about gRPC."""
