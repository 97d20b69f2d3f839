"Who am I among the processes, what ranks say to one another, random streams; what an older torch lacks"
