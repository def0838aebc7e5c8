"""How it is deployed: the image, the compose file's helpers, the bus configuration."""
