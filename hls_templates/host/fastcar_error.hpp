// Errors of the host program: what is wrong, where, and how to fix it.
#ifndef FASTCAR_ERROR_HPP
#define FASTCAR_ERROR_HPP

#include <stdexcept>
#include <string>

namespace fastcar_host {

class Error : public std::runtime_error {
public:
    Error(const std::string& what, const std::string& where, const std::string& hint)
        : std::runtime_error(what + (where.empty() ? "" : "\n  where: " + where) +
                             (hint.empty() ? "" : "\n  hint:  " + hint)) {}
};

}  // namespace fastcar_host

#endif
