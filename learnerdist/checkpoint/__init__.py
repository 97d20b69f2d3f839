"The state of a fit on disk, whole or not at all; going on from there"
