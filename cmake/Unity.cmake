# Most of the time to compile a file goes to LibTorch's templates, which the files of one layer have
# in common: compiled together they take a fifth of it. Names in anonymous namespaces are therefore
# unique within a layer. Where each file is compiled alone, it is also seen to include what it uses.
option(HEADROOM_UNITY_BUILD "Compile several files of a layer at once" ON)

# Puts the sources of a target into groups of at most `most` files of one folder. Files named in
# ARGN are compiled alone.
function(headroom_group_sources target most)
  if(NOT HEADROOM_UNITY_BUILD)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # gcc takes types of anonymous namespaces for those of a header, because another file includes them.
  target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  foreach(source ${sources})
    if(source IN_LIST ARGN)
      continue()
    endif()
    get_filename_component(folder ${source} DIRECTORY)
    get_filename_component(folder "${folder}" NAME)
    math(EXPR number "${count_${folder}}+0")
    math(EXPR group "${number} / ${most}")
    math(EXPR count_${folder} "${number} + 1")
    set_source_files_properties(${source} TARGET_DIRECTORY ${target}
                                PROPERTIES UNITY_GROUP ${folder}_${group})
  endforeach()
endfunction()
