"""The tests of distlaunch."""

import sys

if "pytest" in sys.modules:  # a failed assertion of a helper shows its values, as in a test
    sys.modules["pytest"].register_assert_rewrite("tests.harness", "tests.sim")
