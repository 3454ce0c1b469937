"""Normal forms of the values of a traced function, and the rules that give them."""
