"""One file a policy; each registers its name. `smpart.scheduler.registry` finds them."""
