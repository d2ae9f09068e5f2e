# `cmake --build --preset tidy` checks the library and the program with clang-tidy, compiling nothing. It wants a build folder without
# precompiled headers, because clang cannot read gcc's.
find_program(RUN_CLANG_TIDY_PROGRAM NAMES run-clang-tidy run-clang-tidy-14)
if(RUN_CLANG_TIDY_PROGRAM)
  add_custom_target(tidy
      COMMAND ${RUN_CLANG_TIDY_PROGRAM} -quiet -p ${CMAKE_BINARY_DIR} "${CMAKE_SOURCE_DIR}/(src|apps)/.*[.]cpp"
      WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} USES_TERMINAL VERBATIM)
endif()
