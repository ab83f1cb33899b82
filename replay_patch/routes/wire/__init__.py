"""Routes as a JSON-safe dict and as bytes. A decoder trusts nothing that it is given.
Both forms hold the same arrays, compact and little-endian; nothing is pickled. What a message costs
to decode is bounded by its own length: every size is compared with the bytes that are really there
before anything is allocated. Whatever is not right is a WireError."""
