#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

// Ends a test that has no device: skipped, but failed where CI=true says that a device belongs to the
// machine.
#define ATTNSPAN_NO_DEVICE(REASON)                                                              \
  do {                                                                                          \
    const char* ci = std::getenv("CI");                                                         \
    if (ci != nullptr && std::string(ci) == "true") FAIL() << "CI has no device: " << (REASON); \
    GTEST_SKIP() << (REASON);                                                                   \
  } while (false)
