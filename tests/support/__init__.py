"""What the tests share: waiting without sleeping, watching backends, breaking the network."""
