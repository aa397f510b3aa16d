// Errors of the host program: what is wrong, where, and how to mend it.
#ifndef FASTCAR_ERROR_HPP
#define FASTCAR_ERROR_HPP

#include <stdexcept>
#include <string>

namespace fastcar_host {

class Error : public std::runtime_error {
public:
    Error(const std::string& what, const std::string& where, const std::string& mend)
        : std::runtime_error(what + (where.empty() ? "" : "\n  where: " + where) +
                             (mend.empty() ? "" : "\n  mend:  " + mend)) {}
};

}  // namespace fastcar_host

#endif
