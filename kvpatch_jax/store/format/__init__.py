"""What a file of the store is: its name, header, arrays, encryption and expiry."""
