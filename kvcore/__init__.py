"""What every room needs to know of KV blocks: their hashes, the engines' events, stream recovery and the prefix index.

Imports nothing of ours and does no I/O. Modules: `hashing`, `events`, `stream`, `replay`, `index`, `errors`.
"""
