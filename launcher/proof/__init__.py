"""`distlaunch test-resume`: whether a program that was interrupted goes on as if nothing had happened."""
