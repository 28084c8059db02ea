"""Programs that take locks and permits of the app `shop`; they end when they are killed."""
