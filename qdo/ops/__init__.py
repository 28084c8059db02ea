"""What operators ask and do: functions that return frozen values; printing is up to others."""
