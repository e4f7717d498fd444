#pragma once

#include <cooperative_groups.h>  // has all of it
