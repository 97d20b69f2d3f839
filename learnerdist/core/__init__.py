"Ranks and process groups, collectives, files, random streams; compatibility with older versions of torch"
