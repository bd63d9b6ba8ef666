"""The price book: what hardware and tokens cost, what requests cost by it, and what caches saved."""
