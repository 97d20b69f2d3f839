"The training loop, its events and callbacks: knows nothing of ranks"
