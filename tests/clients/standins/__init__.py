"""Small models of other frameworks' structure, written anew: their modules' names, and how they are cut over ranks."""
