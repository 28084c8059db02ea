"""Chores of the leader: functions that delete nodes nobody needs any more, under its fence."""
