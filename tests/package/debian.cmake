# Makes the Debian package, installs it into a folder of its own, runs the program from there, and
# removes it again.
set(root ${WORK_DIR}/root)
file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${root}/var/lib/dpkg/updates ${root}/var/lib/dpkg/info)
file(TOUCH ${root}/var/lib/dpkg/status)
set(ENV{TMPDIR} ${WORK_DIR})

function(run output)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${WORK_DIR}
                  RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN} failed:\n${text}")
  endif()
  set(${output} "${text}" PARENT_SCOPE)
endfunction()

run(ignored ${CPACK} -G DEB --config ${BINARY_DIR}/CPackConfig.cmake -B ${WORK_DIR})
file(GLOB package ${WORK_DIR}/headroom_*.deb)

run(fields dpkg-deb --field ${package} Depends)
foreach(dependency libtorch libopenblas0-openmp libc6)
  if(NOT fields MATCHES "${dependency}")
    message(FATAL_ERROR "the package does not depend on ${dependency}: ${fields}")
  endif()
endforeach()

# Only root may hand files to root; anybody may be root in a namespace of their own. What the package
# depends on is in the system around the folder.
set(as_root unshare --map-root-user)
run(ignored ${as_root} dpkg --root=${root} --force-depends --force-script-chrootless --install ${package})
run(info ${root}/usr/bin/headroom info)
foreach(word headroom LibTorch OpenMP)
  if(NOT info MATCHES "${word}")
    message(FATAL_ERROR "the installed program does not say ${word}: ${info}")
  endif()
endforeach()
foreach(file include/headroom/headroom.h include/headroom/core/version.h)
  if(NOT EXISTS ${root}/usr/${file})
    message(FATAL_ERROR "the package lacks ${file}")
  endif()
endforeach()

run(ignored ${as_root} dpkg --root=${root} --force-script-chrootless --purge headroom)
file(GLOB_RECURSE left LIST_DIRECTORIES false ${root}/usr/*)
if(left)
  message(FATAL_ERROR "removing the package leaves ${left}")
endif()
file(REMOVE_RECURSE ${WORK_DIR})
