"Loaders, and which sample each rank reads in which order"
