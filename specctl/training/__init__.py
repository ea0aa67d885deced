"""Training of draft heads and of what predicts acceptance: material, the loop over epochs, what to resume from."""
