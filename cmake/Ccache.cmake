# Compiles through ccache where it is present. The launcher sets what ccache needs to cache files that
# use a precompiled header, and to share its cache between checkouts.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_CURRENT_LIST_DIR}/ccache-launcher ${CCACHE_PROGRAM} ${CMAKE_SOURCE_DIR})
endif()
