"""Passes: functions over one graph that find, judge and edit; each says what it did and why."""
