"""Operations for operators: functions that return frozen values and print nothing."""
