"""Agent sessions as a harness makes them: `sessions` plans them from a seed, `client` drives a plan through the
official ``openai`` client."""
